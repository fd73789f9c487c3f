"""How bytes move and how ranks agree: what the ops do when they run, gloo, meetings, names in
profiles.
"""
