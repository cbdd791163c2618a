"""Pre-training objectives: the contract, and one file per objective. `config/registry.py` names them."""
