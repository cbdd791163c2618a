"""Slow twins of the objectives: their losses, what they draw and what they read.

Everything is torch.float64 and differentiable, but for masking, which is lists of numbers.

The masked-LM loss (MLM in eq. 19). For a predicted token with logits z and label y:  log(sum_v exp(z_v)) - z_y.

The MTH regularisers ("Better Pre-Training by Reducing Representation Confusion", eq. 17-18):

Eq. 17: L_TCD = 2 / (n'(n'-1))    sum_{i<j} cos(h_i, h_j)             over n' sampled tokens' last hidden states
Eq. 18: L_HCD = 2 / (L m'(m'-1))  sum_l sum_{i<j} cos(a^l_i, a^l_j)   over m' sampled heads of each of L layers

"Attention weights" a are the pre-softmax logits (the paper's footnote): scaled, with their position terms, before the
padding mask; a head flattened is the vector of its valid×valid entries. With all tokens and heads taken these are
eq. 15 and 16. Valid = not padding; specials are valid. For a packed row, `valid` marks the sequence in question, so
that each packed one counts as its own. Samples are given, not drawn. A zero vector has no cosine: the twins then return
nan.

ELECTRA's replaced-token detection (Clark et al., arXiv:2003.10555). A token counts as replaced where the
discriminator's input differs from the original. For a token with logit z, p = 1 / (1 + exp(−z)) is the probability of
"replaced", and the loss is −log p if it was, −log(1 − p) if it was not, summed over every token that is not padding.

DeBERTaV3's head of replaced-token detection (He et al., arXiv:2111.09543, section 3, and its released code):
y_t = W₂ · gelu(W₁ · LN(h_[CLS] + h_t)), [CLS] being the first token of t's own document.

SimCTG's contrastive loss (arXiv:2202.06417, eq. 2), over the n tokens of each sequence with hidden states h:
    1/(n (n − 1)) Σ_i Σ_{j≠i} max(0, margin − cos(h_i, h_i) + cos(h_i, h_j))
0 for a sequence of fewer than two tokens.

Head disagreement (Li et al., arXiv:1810.10183), of one layer and one document:

    D_subspace = −1/h² Σ_a Σ_b cos(V^a, V^b)
    D_output   = −1/h² Σ_a Σ_b cos(O^a, O^b)
    D_position = −1/h² Σ_a Σ_b |P^a ⊙ P^b|

with the h heads' values V, outputs O = P V and attention probabilities P; |·| sums all entries, of non-negative
matrices. A cosine is the mean over the document's tokens of the cosine of their two vectors. Pairs of a head with
itself are in the sums.

Taking Notes on the Fly (Wu et al., arXiv:2008.01466): the note, the dictionary's update, the input. A word has any
hashable name; an occurrence is where its pieces lie in one sequence.

Masking, written from the rule: one row, one word, one piece at a time. The random numbers are arguments, one of each
kind for every column, so that the twin and the code under test can be given the same ones and must then agree exactly.
"""

import torch
from torch import Tensor, dot

from tests.reference.attention import attend, gelu, layer_norm, linear, within_window

IGNORED_LABEL = -100
"""Label of a token that is not predicted."""
ZERO = torch.zeros((), dtype=torch.float64)


def log_sum_exp(row: Tensor) -> Tensor:
    """log(sum_v exp(row[v])), `[V]` to a scalar; entries of -inf (a padded vocabulary) count as nothing."""
    largest = max(logit.item() for logit in row)
    return largest + torch.log(sum(torch.exp(logit - largest) for logit in row if logit.item() != float("-inf")))


def masked_lm(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropies of the predicted tokens: logits `[N, V]`, labels `[N]` (-100 = not predicted)."""
    pairs = zip(logits, labels.tolist(), strict=True)
    return sum((log_sum_exp(row) - row[label] for row, label in pairs if label != IGNORED_LABEL), ZERO)


def cosine(left: Tensor, right: Tensor) -> Tensor:
    """left · right / (|left| |right|), both `[n]`; a scalar."""
    return dot(left, right) / (torch.sqrt(dot(left, left)) * torch.sqrt(dot(right, right)))


def mean_pairwise_cosine(vectors: list[Tensor], power: int = 1) -> Tensor:
    """The mean cosine, to a power, over the n(n-1)/2 unordered pairs of n >= 2 vectors; a scalar."""
    n = len(vectors)
    assert n >= 2, f"a pair needs two vectors, got {n}"
    pairs = [(i, j) for i in range(n - 1) for j in range(i + 1, n)]
    return 2.0 / (n * (n - 1)) * sum(cosine(vectors[i], vectors[j]) ** power for i, j in pairs)


def tcd(hidden: Tensor, tokens: list[int], power: int = 1) -> Tensor:
    """Eq. 17 for one sequence: hidden `[S, D]`, the last hidden states; tokens, the sampled indices (at least 2).

    With power 2, ours: the mean squared cosine.
    """
    return mean_pairwise_cosine([hidden[token] for token in tokens], power)


def flatten_head(scores: Tensor, valid: list[bool], window: int | None = None) -> Tensor:
    """The valid×valid entries of one head's logits `[S, S]`, row by row: `[n·n]` for n valid tokens.

    With a window only those that the head attends to, |i − j| <= window.
    """
    kept = [index for index, is_valid in enumerate(valid) if is_valid]
    return torch.stack([scores[i, j] for i in kept for j in kept if window is None or abs(i - j) <= window])


def hcd(scores: list[Tensor], heads: list[list[int]], valid: list[bool], windows: list | None = None) -> Tensor:
    """Eq. 18 for one sequence, the mean over its layers; a scalar.

    scores: L logits `[heads, S, S]`. heads: each layer's own sample, at least 2.
    valid: S flags, False for padding. windows: each layer's window, None for a layer without.
    """
    layers = zip(scores, heads, windows or [None] * len(scores), strict=True)
    flat = [[flatten_head(of_layer[head], valid, window) for head in sample] for of_layer, sample, window in layers]
    return sum(mean_pairwise_cosine(vectors) for vectors in flat) / len(flat)


def replaced_token_detection(
    logits: Tensor, discriminator_ids: list[list[int]], original_ids: list[list[int]], valid: list[list[bool]]
) -> tuple[Tensor, int, int, int]:
    """(sum of the losses, tokens judged rightly, replaced tokens, replaced tokens found), logits `[batch, seq]`."""
    loss, right, replaced, found = ZERO, 0, 0, 0
    for row, column in [(i, j) for i, flags in enumerate(valid) for j, counts in enumerate(flags) if counts]:
        was_replaced = discriminator_ids[row][column] != original_ids[row][column]
        probability = 1 / (1 + torch.exp(-logits[row, column]))
        loss = loss - torch.log(probability if was_replaced else 1 - probability)
        says_replaced = probability.item() > 0.5
        right += says_replaced == was_replaced
        replaced += was_replaced
        found += was_replaced and says_replaced
    return loss, right, replaced, found


def contextual_logits(hidden: Tensor, documents: list[int], params: dict[str, Tensor], eps: float = 1e-12) -> Tensor:
    """Last hidden states of a row `[S, D]` and its document numbers (0: padding) → `[S]`, 0 at padding.

    `params` are `norm.weight`, `norm.bias` `[D]`, `dense.weight` `[D, D]`, `dense.bias`, `output.weight` `[1, D]`,
    `output.bias` `[1]`.
    """
    logits = []
    for place, document in enumerate(documents):
        if document == 0:
            logits.append(ZERO)
            continue
        summed = (hidden[documents.index(document)] + hidden[place]).unsqueeze(0)  # [1, D]
        normed = layer_norm(summed, params["norm.weight"], params["norm.bias"], eps)
        inner = gelu(linear(normed, params["dense.weight"], params["dense.bias"]))
        logits.append(linear(inner, params["output.weight"], params["output.bias"])[0, 0])
    return torch.stack(logits)


def contrast(hidden: Tensor, tokens: list[int], margin: float) -> Tensor:
    """The mean hinge of one sequence: hidden `[S, d]`, of which `tokens` are its own."""
    pairs = [(hidden[i], hidden[j]) for i in tokens for j in tokens if i != j]
    hinges = [margin - cosine(one, one) + cosine(one, other) for one, other in pairs]
    return sum((hinge for hinge in hinges if hinge.item() > 0), ZERO) / max(1, len(tokens) * (len(tokens) - 1))


def of_vectors(heads: Tensor, tokens: list[int]) -> Tensor:
    """D of values or outputs `[heads, S, d]` over the tokens of a document."""
    cosines = [cosine(a[token], b[token]) / len(tokens) for a in heads for b in heads for token in tokens]
    return -sum(cosines, ZERO) / len(heads) ** 2


def of_maps(probabilities: Tensor, tokens: list[int]) -> Tensor:
    """D of attention maps `[heads, S, S]` over the pairs of a document's tokens."""
    pairs = [(i, j) for i in tokens for j in tokens]
    products = [a[i, j] * b[i, j] for a in probabilities for b in probabilities for i, j in pairs]
    return -sum(products, ZERO) / len(probabilities) ** 2


def probabilities(logits: Tensor, tokens: list[int], window: int | None = None) -> Tensor:
    """softmax over a document's keys, with a window those at most so far away: `[heads, S, S]` to the same.

    0 outside of the document.
    """
    one_hot = torch.eye(logits.shape[-1], dtype=torch.float64).expand_as(logits)  # as values, for which Z = softmax(A)
    return attend(within_window(logits, window), one_hot, [int(j in tokens) for j in range(logits.shape[-1])])


def note(hidden: Tensor, first: int, last: int, k: int) -> Tensor:
    """Mean of the last hidden states from k tokens before the word `[first, last]` to k after it: `[seq, D]` → `[D]`.

    The window ends with the sequence, whose tokens alone `hidden` holds; the number of states in it divides.
    """
    states = [hidden[place] for place in range(first - k, last + k + 1) if 0 <= place < len(hidden)]
    return sum(states) / len(states)


def update(dictionary: dict, notes: list[tuple], gamma: float) -> dict:
    """NoteDict(w) ← (1 − γ)·NoteDict(w) + γ·(mean of w's notes in the global batch); a first note enters unblended.

    `notes` are pairs (word, note) of all occurrences in the global batch.
    """
    updated = dict(dictionary)
    for word in {word for word, _ in notes}:
        own = [vector for name, vector in notes if name == word]
        mean = sum(own) / len(own)
        updated[word] = (1 - gamma) * dictionary[word] + gamma * mean if word in dictionary else mean
    return updated


def mixed_input(embedded: Tensor, words: list, masked: list[bool], dictionary: dict, mix: float) -> Tensor:
    """(1 − λ)·(token + position) + λ·NoteDict(w) at the pieces of rare words, `[seq, D]`.

    `words` names the rare word that each token is a piece of, and its occurrence, as a pair, or None; no piece of an
    occurrence with any piece `masked` reads its note, and a word without a note reads none.
    """
    rows = []
    for place, vector in enumerate(embedded):
        is_hidden = any(is_masked and words[other] == words[place] for other, is_masked in enumerate(masked))
        reads = words[place] is not None and words[place][0] in dictionary and not is_hidden
        rows.append((1 - mix) * vector + mix * dictionary[words[place][0]] if reads else vector)
    return torch.stack(rows)


def words_of(ids, selectable, starts_word):
    """Lists of columns: the words."""
    words: list[list[int]] = []
    previous_selectable = False
    for column, token in enumerate(ids):
        if selectable[column]:
            if starts_word[token] or not previous_selectable:
                words.append([])
            words[-1].append(column)
        previous_selectable = selectable[column]
    return words


def units_of(words, masking, budget, word_counts):
    """Lists of columns that are masked together: tokens, words, or n-grams of as many words as drawn for their first
    column; the pieces of words of more than four pieces stay single."""
    if masking == "token":
        return [[column] for word in words for column in word]
    units = []
    words = list(words)
    while words:
        word = words.pop(0)
        if len(word) > 4:
            units.extend([column] for column in word)
            continue
        unit = [word]
        while masking == "ngram" and len(unit) < word_counts[word[0]] and words:
            neighbour = words[0][0] == unit[-1][-1] + 1
            if len(words[0]) > 4 or not neighbour or len(sum(unit, [])) + len(words[0]) > budget:
                break
            unit.append(words.pop(0))
        units.append(sum(unit, []))
    return units


def words_drawn(number):
    """Words of an n-gram, p(n) proportional to 1/n for n up to 3, from a number in [0, 1)."""
    return 1 if number < 6 / 11 else 2 if number < 9 / 11 else 3


def select(ids, selectable, starts_word, order_numbers, mask_prob, masking="whole-word", ngram_numbers=None):
    """Columns to predict. Units in the order of their first column's number, each taken if it fits the budget."""
    budget = max(1, round(mask_prob * sum(selectable)))
    word_counts = None if ngram_numbers is None else [words_drawn(number) for number in ngram_numbers]
    units = units_of(words_of(ids, selectable, starts_word), masking, budget, word_counts)
    units.sort(key=lambda unit: (order_numbers[unit[0]], unit[0]))
    if not units:
        return []
    selected: list[int] = []
    for unit in units:
        if len(selected) + len(unit) <= budget:
            selected.extend(unit)
    return sorted(selected or units[0])


def corrupt(ids, selected, mask_id, action_numbers, random_pieces):
    """Input ids after masking and labels, as lists: 80 % [MASK], 10 % a random piece, 10 % kept."""
    masked, labels = list(ids), [-100] * len(ids)
    for column in selected:
        labels[column] = ids[column]
        if action_numbers[column] < 0.8:
            masked[column] = mask_id
        elif action_numbers[column] < 0.8 + 0.1:
            masked[column] = random_pieces[column]
    return masked, labels
