"""Which folders are masked LMs, and what their heads compute for one place per row."""

import json

import pytest
import torch

from megatron_ddrp.encoders.masked_lm import HuggingFaceLogits, load_masked_lm, piece_logits
from megatron_ddrp.errors import UserError
from tests.unit.conversion.conftest import write_checkpoint

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
FAMILIES = {
    "bert": {},
    "roberta": {},
    "electra": {"embedding_size": 8},
    "albert": {"embedding_size": 8},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "modernbert": {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3},
    "mpnet": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_sees_one_place_and_gives_the_logits_of_the_whole_row(family):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    ids, places = torch.randint(4, 20, (3, 7)), torch.tensor([1, 5, 3])
    with torch.inference_mode():
        expected = model(ids).logits[torch.arange(3), places]
        one_place = HuggingFaceLogits(model)
        torch.testing.assert_close(one_place(ids, places), expected, rtol=0, atol=1e-5)
    assert one_place.is_narrow
    assert expected.std() > 1e-3


def test_a_head_that_takes_its_states_elsewhere_gets_the_whole_row():
    class Elsewhere(torch.nn.Module):
        """The head reads the states of a second pass, at a place of its own."""

        def __init__(self, model):
            super().__init__()
            self.model, self.config, self.base_model = model, model.config, model.base_model

        def forward(self, ids):
            output = self.model(ids)
            output["logits"] = output.logits + torch.arange(output.logits.shape[1])[:, None]
            return output

    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES)
    model = Elsewhere(transformers.BertForMaskedLM(config).eval())
    ids, places = torch.randint(4, 20, (3, 7)), torch.tensor([1, 5, 3])
    with torch.inference_mode():
        expected = model(ids).logits[torch.arange(3), places]
        logits = HuggingFaceLogits(model)
        assert torch.equal(logits(ids, places), expected)
    assert not logits.is_narrow


@pytest.mark.parametrize("name", ["BertModel", "ElectraForPreTraining", "BertForSequenceClassification"])
def test_a_folder_without_the_head_is_refused_in_one_line(name, tmp_path, tokenizer):
    cls = getattr(transformers, name)
    cls(cls.config_class(**SIZES)).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(tokenizer.pieces) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    with pytest.raises(
        UserError, match=r"minimal pairs \(BLiMP\) are not defined: no masked-LM head; the folder lacks"
    ):
        load_masked_lm(tmp_path)


def test_a_discriminator_of_ours_is_refused_as_checkpoint_and_as_export(tmp_path, tokenizer):
    from megatron_ddrp.conversion.to_huggingface import export_checkpoint

    run = write_checkpoint(tmp_path / "run", tokenizer, "electra", position_encoding="ddrp")
    export_checkpoint(run, tmp_path / "hf")
    with pytest.raises(UserError, match="no masked-LM head; the run trained a discriminator"):
        load_masked_lm(run)
    with pytest.raises(UserError, match="no masked-LM head; the folder lacks"):
        load_masked_lm(tmp_path / "hf")


def test_random_weights_follow_their_seed_and_are_not_those_of_the_folder(checkpoints):
    encoder = load_masked_lm(checkpoints["absolute"], random_init=True)
    ids, places = torch.tensor([[2, 5, 4, 3]]), torch.tensor([2])
    with torch.inference_mode():
        first, again, other = (piece_logits(encoder, seed, torch.device("cpu"))(ids, places) for seed in (1, 1, 2))
        loaded = piece_logits(load_masked_lm(checkpoints["absolute"]), 1, torch.device("cpu"))(ids, places)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, loaded)
