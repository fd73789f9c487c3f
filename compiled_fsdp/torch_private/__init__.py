"""What is private in torch, by subject. What cannot stand behind a function (hooks of the compiler,
stock's own parts, types of ops and nodes) is used where it belongs, in files that say so.
"""
