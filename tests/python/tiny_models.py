"""Tiny random transformers models, one per family, and how they are run: on a GPU with FOLIO_TEST_DEVICE=cuda."""

import os
import random

import torch
import transformers

DEVICE = torch.device(os.environ.get("FOLIO_TEST_DEVICE", "cpu"))

torch.set_num_threads(1)  # tiny tensors: threads would only wait for one another

WINDOW = 9  # shorter than every prompt's padded length, so that windows hide keys

_COMMON = dict(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=128,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)

FAMILIES = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", dict(sliding_window=WINDOW)),
    "gemma2": ("Gemma2", dict(sliding_window=WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=2.0)),
    "gemma3": ("Gemma3", dict(sliding_window=WINDOW, query_pre_attn_scalar=16, sliding_window_pattern=2)),
    "gpt_oss": ("GptOss", dict(sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2)),
    "phi3": ("Phi3", {}),
}


def make(family, seed=1, **changes):
    """A model in float32, the same on every device. Attention matters in it: its weights are large enough to make logits
    of attention differ."""
    name, own = FAMILIES[family]
    config_class = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(name, name + "Config"))
    torch.manual_seed(seed)
    model = getattr(transformers, name + "ForCausalLM")(config_class(**{**_COMMON, **own, **changes})).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if any(part in parameter_name for part in ("q_proj", "k_proj", "qkv_proj", "sinks")):
                parameter.normal_(0.0, 0.4)
    return model.to(DEVICE)


def prompts(lengths, seed=2):
    chosen = random.Random(seed)
    return [[chosen.randrange(1, 128) for _ in range(length)] for length in lengths]


def pad(sequences, side):
    """(ids, mask) int64 [batch, longest]."""
    longest = max(map(len, sequences))
    ids, mask = torch.zeros(2, len(sequences), longest, dtype=torch.long, device=DEVICE)
    for row, tokens in enumerate(sequences):
        place = slice(longest - len(tokens), longest) if side == "left" else slice(0, len(tokens))
        ids[row, place], mask[row, place] = torch.tensor(tokens, device=DEVICE), 1
    return ids, mask


@torch.no_grad()
def forced_logits(model, implementation, sequences, side, steps, cache=None, seed=3):
    """float32 logits [tokens, vocabulary] of real tokens: a padded prefill, then `steps` decodes of given tokens."""
    model.set_attn_implementation(implementation)
    cache = transformers.DynamicCache(config=model.config) if cache is None else cache
    ids, mask = pad(sequences, side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    first = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
    logits = [first[mask.bool()]]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(1, 128, (len(sequences), 1), generator=generator).to(DEVICE)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        positions = mask.sum(1, keepdim=True) - 1
        logits.append(model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1])
    return torch.cat(logits)


class Perturbed:
    """An attention function that computes as the model's eager one, then adds what rounding might: +- epsilon times the
    largest |v| of the head. Knows the largest |logit| of attention and the most keys it met."""

    def __init__(self, name, epsilon):
        self.name, self.epsilon = name, epsilon
        self.largest_score = self.most_keys = 0.0
        self.generator = torch.Generator().manual_seed(4)
        transformers.AttentionInterface.register(name, self)
        transformers.AttentionMaskInterface.register(name, transformers.masking_utils.sdpa_mask)

    def __call__(self, module, query, key, value, mask, scaling, softcap=None, s_aux=None, **unused):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(2, 3) * scaling
        self.largest_score = max(self.largest_score, scores.abs().max().item())
        self.most_keys = max(self.most_keys, key.shape[2])
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        visible = mask if mask is not None else torch.ones_like(scores, dtype=torch.bool)  # one query, all keys
        if mask is None and query.shape[2] > 1:
            visible = visible.tril(key.shape[2] - query.shape[2])
        scores = scores.masked_fill(~visible, -1e30)
        if s_aux is not None:
            sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], 3)
        p = scores.softmax(3)[..., : key.shape[2]]
        signs = torch.randint(0, 2, (*p.shape[:3], value.shape[3]), generator=self.generator).to(DEVICE) * 2.0 - 1
        out = p @ value + self.epsilon * value.abs().amax((2, 3), keepdim=True) * signs
        return out.transpose(1, 2), None


@torch.no_grad()
def greedy(model, implementation, prompt, new_tokens, **options):
    """(tokens, logits [new_tokens, vocabulary]) of one prompt on its own."""
    model.set_attn_implementation(implementation)
    answer = model.generate(
        torch.tensor([prompt], device=DEVICE),
        do_sample=False,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return answer.sequences[0, len(prompt) :].tolist(), torch.stack(answer.logits)[:, 0]


def assert_same_tokens(tokens, expected, logits, nearly=1e-4):
    """Equal, or parted where the two best logits lie closer than rounding can tell apart."""
    assert len(tokens) == len(expected)
    for step, (token, wanted) in enumerate(zip(tokens, expected)):
        if token != wanted:
            gap = logits[step, wanted] - logits[step, token]
            assert 0 <= gap < nearly, f"step {step}: {token} instead of {wanted}, whose logit is {gap} higher"
            return
