"""A live guard of quality: which answers are scored again, what that bounds, and when reuse is cut
back."""
