"""The one attention: what it computes, and the backends that do."""
