"""Fine-tuning on GLUE (Wang et al., arXiv:1804.07461), as in section 4.4 and appendix B of the DDRP+MTH paper."""
