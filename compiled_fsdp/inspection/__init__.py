"""Everything that is read afterwards: what became of a model, folders of dumps, the report."""
