"""The passes, one a file. Import them from `compiled_fsdp.passes`; the list is
`compiled_fsdp.passes.pipeline`.
"""

if __name__ == "passes":
    raise ImportError(
        "import compiled_fsdp.passes, not passes: a second import would create every class twice"
    )
