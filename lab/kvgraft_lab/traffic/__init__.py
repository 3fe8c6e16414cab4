"""Analysis of recorded traffic: what KV reuse would save.

Traces are read, replayed through the native engine's admission, and reported. No model runs, and no
written file holds a prompt's text.
"""
