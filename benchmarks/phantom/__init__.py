"""A CUDA device that computes nothing, and what runs on it."""
