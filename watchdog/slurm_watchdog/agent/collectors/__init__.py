"""One module a thing that is looked at in every tick: reading is split from parsing."""
