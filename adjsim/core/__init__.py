"""What every other package stands on: arrays, states, parameters, readings, boxes, noise."""
