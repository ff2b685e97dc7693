"""The uncertainty of tokens: one text, one answer, however it is written, read, padded or cut."""

import copy

import peft
import pytest
import torch
import transformers as hf
from torch import nn

import bbalpha
from bbalpha.integrations.transformers import generate_tokens, score_tokens, tokens
from bbalpha.integrations.transformers.masks import Columns, Places, Positioned, words

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
    pytest.mark.filterwarnings("ignore:.*`max_new_tokens`.*"),
]

V, K, NEW = 40, 6, 5
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
BART = {"decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16}
VALUES = ("log_prob", "entropy", "expected_entropy", "mutual_information")


def gpt2(**options):
    given = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "initializer_range": 0.5} | SPECIAL | options
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=V, **given))


def llama(kind=("Llama",), layers=1, **options):
    config = getattr(hf, f"{kind[0]}Config")(
        vocab_size=V, num_hidden_layers=layers, initializer_range=0.5, **LLAMA, **SPECIAL, **options
    )
    return getattr(hf, f"{kind[0]}ForCausalLM")(config)


def llama_with_dropout_added():
    return bbalpha.add_dropout(llama(), 0.2)  # in front of the head too, which generate runs on one position alone


def opt():  # draws whether to skip layers, and folds texts and positions
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "init_std": 0.5}
    config = hf.OPTConfig(vocab_size=V, max_position_embeddings=32, word_embed_proj_dim=16, **sizes, **SPECIAL)
    return hf.OPTForCausalLM(config)


def adapted():
    model = gpt2(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    made = peft.get_peft_model(
        model,
        peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.3, target_modules=["c_attn"], fan_in_fan_out=True),
    )
    for name, p in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.5)
    return made


def t5():
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "initializer_factor": 3.0}
    given = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=V, **sizes, **given))


def bart(**options):
    given = {"d_model": 16, "encoder_layers": 1, "decoder_ffn_dim": 16, "max_position_embeddings": 32} | BART | options
    given |= {"init_std": 0.5, "decoder_start_token_id": 0, "forced_eos_token_id": None, **SPECIAL}
    return hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=V, **given))


def mistral():
    return llama(("Mistral",), attention_dropout=0.2, sliding_window=5)


def eager():
    config = hf.LlamaConfig(vocab_size=V, num_hidden_layers=1, attention_dropout=0.2, **LLAMA, **SPECIAL)
    return hf.LlamaForCausalLM._from_config(config, attn_implementation="eager")


def bloom():
    sizes = {"hidden_size": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.5}
    config = hf.BloomConfig(vocab_size=V, hidden_dropout=0.1, attention_dropout=0.1, **sizes, **SPECIAL)
    return hf.BloomForCausalLM(config)


def slow(*made):
    return [pytest.param(make, marks=pytest.mark.slow) for make in made]


MODELS = [gpt2, llama_with_dropout_added, opt, adapted, t5, *slow(mistral, eager, bloom, bart)]


def texts(side, lengths=(5, 3, 7)):
    """Prompts one by one, and the same padded on one side."""
    each = [torch.randint(3, V, (n,)) for n in lengths]
    ids, mask = torch.full((len(each), max(lengths)), 2), torch.zeros(len(each), max(lengths), dtype=torch.long)
    for row, own, text in zip(ids, mask, each, strict=True):
        part = slice(-len(text), None) if side == "left" else slice(0, len(text))
        row[part], own[part] = text, 1
    return each, {"input_ids": ids, "attention_mask": mask}


def close(a, b):
    for name in VALUES:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_text_scores_the_same_alone_padded_and_read_again(make):
    model = make()
    writes = model.config.is_encoder_decoder
    each, batch = texts("right" if writes else "left")
    p = generate_tokens(model, batch, max_new_tokens=NEW, n_passes=K, seed=3)
    assert bool((p.mutual_information[p.counts] > 0).any())
    torch.testing.assert_close(p.log_prob.exp()[p.counts], p.prob[p.counts])
    for n, text in enumerate(each):  # one by one
        alone = generate_tokens(model, text[None], max_new_tokens=NEW, n_passes=K, seed=3)
        T = int(alone.counts.sum())
        assert int(p.counts[n].sum()) == T
        assert torch.equal(alone.tokens[0, :T], p.tokens[n, :T])
        for name in VALUES:
            torch.testing.assert_close(getattr(alone, name)[0, :T], getattr(p, name)[n, :T], rtol=1e-4, atol=2e-5)
    if writes:  # read again
        close(score_tokens(model, batch, labels=p.tokens.masked_fill(~p.counts, -100), n_passes=K, seed=3), p)
        return
    whole = {"input_ids": torch.cat((batch["input_ids"], p.tokens), 1)}
    whole["attention_mask"] = torch.cat((batch["attention_mask"], p.counts.long()), 1)
    again = score_tokens(model, whole, n_passes=K, seed=3)
    for name in VALUES:
        torch.testing.assert_close(
            getattr(again, name)[:, -p.tokens.shape[1] :], getattr(p, name), rtol=1e-4, atol=2e-5
        )


def test_passes_are_those_of_dropout():
    model, ids = gpt2(initializer_range=0.2), torch.randint(3, V, (2, 6))
    ours = score_tokens(model, ids, n_passes=400, seed=0)
    theirs = bbalpha.predict_classification(model, {"input_ids": ids, "use_cache": False}, n_passes=400, class_axis=-1)
    expected = theirs.log_probs[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(ours.log_prob[:, 1:], expected, rtol=0, atol=0.05)
    torch.testing.assert_close(ours.entropy[:, 1:], theirs.entropy[:, :-1], rtol=0, atol=0.05)
    mutual = theirs.mutual_information[:, :-1]
    torch.testing.assert_close(ours.mutual_information[:, 1:], mutual, rtol=0.2, atol=0.01)


def positioned(n_passes, first=0, count=None, seed=0):
    class Config:
        is_encoder_decoder = False

    places = Places({}, None, torch.zeros(1, 1, dtype=torch.long), None, config=Config(), head=None)
    return Positioned(places, n_passes, first, n_passes if count is None else count, seed)


@pytest.mark.parametrize("rate", [0.125, 0.5])
def test_masks_are_balanced_and_part_of_a_larger_whole(rate):
    positions = torch.arange(50)
    kept = positioned(8)._at(1, rate, positions, 101).keep()  # (50, 8, 101)
    assert torch.equal((~kept).sum(1), torch.full((50, 101), int(8 * rate)))
    assert abs(float(kept.float().mean()) - (1 - rate)) < 1e-6
    by_pass = kept.float().mean((0, 2))
    assert bool(((by_pass - (1 - rate)).abs() < 0.04).all())
    part = positioned(8, first=3, count=4)._at(1, rate, positions[7:9], 33).keep()
    assert torch.equal(part, kept[7:9, 3:7, :33])
    other = positioned(8, seed=1)._at(2, rate, positions, 101).keep()
    assert 0.5 < float((other == kept).float().mean()) / ((1 - rate) ** 2 + rate**2) < 1.5


def test_a_rate_that_cannot_be_balanced():
    noise = positioned(4)._at(1, 1e-4, torch.arange(200), 500)
    dropped = float((noise.values == 0).float().mean())
    assert 3e-5 < dropped < 3e-4
    assert float(noise.values.max()) == pytest.approx(1 / (1 - 1e-4))


def test_words_are_random_bits():
    bits = words(5, torch.arange(300), 40).view(torch.uint8).view(300, -1)
    ones = sum(((bits >> i) & 1).double() for i in range(8)) / 8
    assert abs(float(ones.mean()) - 0.5) < 0.002
    neighbours = torch.corrcoef(bits[:2].double())[0, 1]
    assert abs(float(neighbours)) < 0.2


def test_columns_are_found_once():
    columns = Columns.of(torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0, 1], [0, 1]]))
    assert columns.index.shape == columns.keys.shape == (1, 2)
    assert Columns.of(torch.tensor([[0, 1], [1, 2]]), None).index.shape == (2, 2)


# ------------------------------------------------------------------------------ writing


def test_a_text_ends_with_its_token_and_the_others_go_on():
    model = gpt2()
    _, batch = texts("left")
    free = generate_tokens(model, batch, max_new_tokens=NEW, n_passes=K, seed=3)
    end = int(free.tokens[0, 1])
    config = copy.deepcopy(model.generation_config)
    config.eos_token_id = [end, 1]
    p = generate_tokens(model, batch, max_new_tokens=NEW, generation_config=config, n_passes=K, seed=3)
    first = int((free.tokens[0] == end).nonzero()[0])
    assert p.counts[0].tolist()[: first + 2] == [True] * (first + 1) + [False]
    assert bool((p.log_prob[~p.counts] == 0).all() & (p.prob[~p.counts] == 0).all() & (p.entropy[~p.counts] == 0).all())
    apart = generate_tokens(
        model, batch, max_new_tokens=NEW, generation_config=config, n_passes=K, seed=3, batch_size=1
    )
    assert torch.equal(apart.counts, p.counts)
    close(apart, p)


def test_the_likeliest_token_of_the_mean_is_taken():
    model, ids = gpt2(), torch.randint(3, V, (1, 4))
    p = generate_tokens(model, ids, max_new_tokens=1, n_passes=K, seed=5)
    every = torch.cat((ids.repeat(V, 1), torch.arange(V)[:, None]), 1)
    probs = score_tokens(model, every, n_passes=K, seed=5).prob[:, -1]
    assert int(probs.argmax()) == int(p.tokens)
    torch.testing.assert_close(probs.sum(), torch.tensor(1.0))


def test_sampled_tokens_are_one_for_all_passes_and_follow_the_seed():
    model = gpt2(eos_token_id=None)
    config = hf.GenerationConfig(do_sample=True, top_k=0, max_new_tokens=NEW, pad_token_id=2)
    same = torch.randint(3, V, (1, 4)).repeat(4, 1)
    before = torch.get_rng_state()
    p, q = (generate_tokens(model, same, generation_config=config, n_passes=K, seed=1) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(p.tokens, q.tokens)
    assert len(p.tokens.unique(dim=0)) > 1  # texts that begin alike go on by themselves
    again = score_tokens(model, torch.cat((same, p.tokens), 1), n_passes=K, seed=1)
    torch.testing.assert_close(again.log_prob[:, 4:], p.log_prob, rtol=1e-4, atol=2e-5)


def test_without_a_seed_the_global_generator_is_used():
    model, ids = gpt2(), torch.randint(3, V, (1, 4))
    torch.manual_seed(7)
    one, two = (score_tokens(model, ids, n_passes=K) for _ in range(2))
    torch.manual_seed(7)
    again = score_tokens(model, ids, n_passes=K)
    assert torch.equal(one.log_prob, again.log_prob)
    assert not torch.equal(one.log_prob, two.log_prob)


# ------------------------------------------------------------------------------ reading


def test_rows_and_passes_may_be_cut_anyhow(monkeypatch):
    model = gpt2()
    _, batch = texts("right")
    whole = score_tokens(model, batch, n_passes=K, seed=0)
    monkeypatch.setattr(tokens, "_BUDGET", 7 * V * 2)  # two passes of one text
    close(score_tokens(model, batch, n_passes=K, seed=0), whole)


def test_labels_say_what_counts():
    model, ids = gpt2(), torch.randint(3, V, (2, 5))
    labels = ids.masked_fill(torch.arange(5) < 3, -100)
    p = score_tokens(model, ids, labels=labels, n_passes=K, seed=0)
    assert p.counts.tolist() == [[False, False, False, True, True]] * 2
    whole = score_tokens(model, ids, n_passes=K, seed=0)
    torch.testing.assert_close(p.log_prob, whole.log_prob.masked_fill(~p.counts, 0.0))


def test_the_whole_text_by_one_function():
    p = score_tokens(gpt2(), torch.randint(3, V, (2, 5)), n_passes=K, seed=0)
    expected = p.pass_log_probs.sum(2).exp().mean(0).log()
    torch.testing.assert_close(p.joint_log_prob, expected)
    assert p.n_passes == K


def test_live_sites_alone_draw():
    model, ids = gpt2(), torch.randint(3, V, (1, 5))
    one = score_tokens(model, ids, n_passes=K, sites="transformer.h.1.mlp", seed=0)
    p = score_tokens(model, ids, n_passes=K, seed=0)
    assert 0 < float(one.mutual_information.sum()) < float(p.mutual_information.sum())


def test_the_model_is_not_touched():
    model = gpt2().train()
    flags = [m.training for m in model.modules()]
    generate_tokens(model, torch.randint(3, V, (1, 4)), max_new_tokens=2, n_passes=K)
    assert [m.training for m in model.modules()] == flags
    assert "forward" not in vars(model)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


# ------------------------------------------------------------------------------ what is refused


def refused(message, error=ValueError):
    return pytest.raises(error, match=message)


def test_bad_inputs_are_one_clear_sentence():
    model, (_, right) = gpt2(), texts("right")
    ids = torch.zeros(1, 3, dtype=torch.long)
    with refused("padded on the left"):
        generate_tokens(model, right, max_new_tokens=2)
    with refused("at least 2"):
        score_tokens(model, ids, n_passes=1)
    with refused("must hold 'input_ids'"):
        score_tokens(model, {"pixel_values": torch.zeros(1, 3, 2, 2)})
    with refused("a token in every row"):
        score_tokens(model, {"input_ids": ids, "attention_mask": ids})
    with refused("shape of the ids"):
        score_tokens(model, ids, labels=ids[:, :2])
    with refused("language model of transformers", TypeError):
        score_tokens(nn.Linear(2, 2), ids)
    with refused("greedy or sampling"):
        generate_tokens(model, ids, generation_config=hf.GenerationConfig(num_beams=2, max_new_tokens=2))
    with refused("kind of cache"):
        config = hf.GenerationConfig(cache_implementation="static", max_new_tokens=2)
        generate_tokens(model, ids, generation_config=config)


def test_models_that_cannot_be_scored_are_refused():
    ids = torch.arange(3, 7)[None]
    with refused("at least one active random site"):
        score_tokens(llama(), ids)
    with refused("reads both ways"):
        config = hf.BertConfig(vocab_size=V, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        score_tokens(hf.BertForMaskedLM(config), ids)
    with refused("layerdrop"):
        score_tokens(bart(decoder_layerdrop=0.3), ids, labels=ids, seed=0)
    with refused("that an encoder-decoder writes"):
        score_tokens(t5(), ids)


def test_a_model_that_has_changed_is_looked_at_anew():
    model, ids = gpt2(resid_pdrop=0.0), torch.randint(3, V, (1, 5))
    before = score_tokens(model, ids, n_passes=K, seed=0)
    model.transformer.h[0].mlp.dropout.p = 0.5
    after = score_tokens(model, ids, n_passes=K, seed=0)
    assert not torch.equal(before.log_prob, after.log_prob)
    bbalpha.add_dropout(model, 0.2)
    assert not torch.equal(score_tokens(model, ids, n_passes=K, seed=0).log_prob, after.log_prob)
