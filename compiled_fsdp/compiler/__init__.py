"""From a traced graph to the one that runs: the passes are run here, inside Inductor and in our own
backend.
"""
