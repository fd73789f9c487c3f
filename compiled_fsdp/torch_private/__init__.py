"""Everything that is private in torch, by subject: elsewhere only collectives and compiler hooks
are, in files that say so.
"""
