"""SamKV: many documents of which a part is kept; memory and times. How they answer:
`research.quality`."""
