"""The flags of a tiny run, as the integration tests have them."""

from tests.integration.conftest import flags as flags
