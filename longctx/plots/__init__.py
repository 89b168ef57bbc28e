"""Plans as pictures: in a file, on a terminal, as a table of bins."""
