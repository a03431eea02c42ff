"""Plan memory and speed of a step on hardware that is described rather than attached."""
