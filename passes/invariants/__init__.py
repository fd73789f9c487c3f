"""What `verify` checks: rules about messages, memory and gradients, each one function."""
