"""Lists of names on the command line."""


def split_names(text: str, separator: str) -> list[str]:
    """Return the names between separators, without spaces around them; empty ones are left out."""
    return [part.strip() for part in text.split(separator) if part.strip()]
