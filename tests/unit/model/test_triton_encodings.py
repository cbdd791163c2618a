"""Every encoding in the Triton kernels, under the interpreter: a file of its own, so that another worker runs it."""

from tests.unit.model.triton_interpreter import assert_checks_pass, needs_triton


@needs_triton
def test_every_encoding_under_the_interpreter():
    assert_checks_pass("triton_encodings.py", 50)
