"""Everything that is sharded: units, their flat buffers and parameters, meshes, placements, what a
module's names stand for.
"""
