"""What each launcher of processes tells them about their place, read from the environment."""
