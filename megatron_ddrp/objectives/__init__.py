"""Pre-training objectives: the contract, and one class per objective. `config/registry.py` names them."""
