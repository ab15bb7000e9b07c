"""Virtual sites: particles without mass whose places follow from those of atoms."""
