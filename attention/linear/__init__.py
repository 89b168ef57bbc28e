"""Linear attention and short convolutions over packed documents, each split over the ranks of its
ring."""
