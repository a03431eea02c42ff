"""Split models of any kind into parameters and other arrays, and merge them again."""
