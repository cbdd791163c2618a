"""The same encoder out of a training checkpoint, one of its steps, and its export."""

import pytest
import torch

from megatron_ddrp.errors import UserError
from tasks.glue.data import Example, encode, pad_batch
from tasks.glue.encoder import load_encoder
from tasks.glue.tasks import TASKS

EXAMPLES = [Example(("red cat runs", "bird sings"), 0), Example(("dog", "blue green dog sleeps red"), 1)]


def hidden(encoder):
    """Hidden states of both rows and which of them are no padding: `[2, seq, hidden]`, `[2, seq]`."""
    encoded = encode(TASKS["RTE"], EXAMPLES, encoder.tokenizer, encoder.max_length)
    batch = pad_batch(encoded, torch.arange(2).numpy()).map(torch.from_numpy)
    with torch.no_grad():
        return encoder.module.eval()(batch), batch.document_ids > 0


def test_checkpoint_step_and_export_give_equal_states(checkpoint_folder, tmp_path):
    pytest.importorskip("transformers")
    from megatron_ddrp.conversion.to_huggingface import export_checkpoint

    export_checkpoint(checkpoint_folder, tmp_path / "exported")
    first = load_encoder(checkpoint_folder)
    states, valid = hidden(first)
    assert states.shape == (2, int(valid.sum(1).max()), first.hidden_size)
    assert not torch.allclose(states[0, 0], states[1, 0])
    for folder in (checkpoint_folder / "iter_0000003", tmp_path / "exported"):
        others, other_valid = hidden(load_encoder(folder))
        assert (valid == other_valid).all()
        torch.testing.assert_close(others[valid], states[valid], rtol=0, atol=1e-5)


def test_a_step_is_the_same_run_as_its_folder(checkpoint_folder):
    whole, step = load_encoder(checkpoint_folder), load_encoder(checkpoint_folder / "iter_0000003")
    assert whole.fingerprint == step.fingerprint
    assert whole.fingerprint != load_encoder(checkpoint_folder, random_init=True).fingerprint


def test_each_run_has_a_copy_of_its_own(checkpoint_folder):
    encoder = load_encoder(checkpoint_folder)
    copy = encoder.fresh(1, torch.device("cpu"))
    for loaded, copied in zip(encoder.module.parameters(), copy.parameters(), strict=True):
        assert (loaded == copied).all()
        assert loaded.data_ptr() != copied.data_ptr()


def test_random_weights_are_a_function_of_the_seed(checkpoint_folder):
    encoder = load_encoder(checkpoint_folder, random_init=True)
    first, again, other = (
        next(p for p in encoder.fresh(seed, torch.device("cpu")).parameters() if p.ndim > 1) for seed in (1, 1, 2)
    )
    assert (first == again).all()
    assert (first != other).any()


def test_the_fingerprint_follows_every_weight(checkpoint_folder):
    from safetensors.torch import load_file, save_file

    before = load_encoder(checkpoint_folder).fingerprint
    path = checkpoint_folder / "iter_0000003" / "model.safetensors"
    weights = load_file(path)
    weights[sorted(weights)[-1]].view(-1)[0] += 1e-3
    save_file(weights, path, {"format": "pt"})
    assert load_encoder(checkpoint_folder).fingerprint != before


def test_a_run_without_a_checkpoint_is_refused(checkpoint_folder):
    for file in ("latest", "iter_0000003/state.json", "iter_0000003/model.safetensors"):
        (checkpoint_folder / file).unlink()
    (checkpoint_folder / "iter_0000003").rmdir()
    with pytest.raises(UserError, match="holds no checkpoint"):
        load_encoder(checkpoint_folder)


def test_a_damaged_configuration_is_refused(checkpoint_folder):
    (checkpoint_folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        load_encoder(checkpoint_folder)
