"""Scoring of minimal pairs, such as BLiMP (Warstadt et al., arXiv:1912.00582), by masked LMs without fine-tuning."""
