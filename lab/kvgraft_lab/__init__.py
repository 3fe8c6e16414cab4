"""Laboratory of KVGraft: evaluation, traffic analysis, simulation, and the demonstration model.

It builds on `kvgraft`, which never imports it. Its commands join the `kvgraft` command line through
the entry point group `kvgraft.commands`.
"""
