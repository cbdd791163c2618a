"""Minimal pairs, such as BLiMP's (Warstadt et al., arXiv:1912.00582), scored by masked language models as they are."""
