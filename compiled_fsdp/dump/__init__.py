"""What is written while a model compiles."""
