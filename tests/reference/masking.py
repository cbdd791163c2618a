"""Loop twin of masking, written from the rule: one row, one word, one piece at a time.

The random numbers are arguments, one of each kind for every column, so that the twin and the code under test can be
given the same ones and must then agree exactly.
"""


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
