"""Will it fit, and how fast, on hardware that is described rather than attached."""
