"""Train DFlash drafters: target ranks stream context features, drafter ranks learn from them."""
