"""What reuse would give to recorded traffic: traces are read, replayed through the native engine's
admission, and reported. No model runs, and nothing that is written holds a prompt's text."""
