"""A network whose weights are Gaussians, N(mu, sigma), and its training."""
