"""Page of a ladder of budgets (`megatron-ddrp ladder`): do the paper's claims hold as the budget grows?"""
