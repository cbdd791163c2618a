"""Loop twin of whole-word masking, written from the rule: one row, one word, one piece at a time.

The random numbers are arguments, one of each kind for every column, so that the twin and the code under test can be
given the same ones and must then agree exactly.
"""


def units_of(ids, selectable, starts_word):
    """Lists of columns that are masked together: words, and the single pieces of words of more than four pieces."""
    words: list[list[int]] = []
    previous_selectable = False
    for column, token in enumerate(ids):
        if selectable[column]:
            if starts_word[token] or not previous_selectable:
                words.append([])
            words[-1].append(column)
        previous_selectable = selectable[column]
    units = []
    for word in words:
        units.extend([word] if len(word) <= 4 else [[column] for column in word])
    return units


def select(ids, selectable, starts_word, order_numbers, mask_prob):
    """Columns to predict. Units in the order of their first column's number, each taken if it fits the budget."""
    units = sorted(units_of(ids, selectable, starts_word), key=lambda unit: (order_numbers[unit[0]], unit[0]))
    if not units:
        return []
    budget = max(1, round(mask_prob * sum(selectable)))
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
