"""One line of a training's log, and blocks of many: step, loss, phase, checkpoint. Pure."""
