"""Contact: penalties of the gaps between vertices and surfaces, and between particles."""
