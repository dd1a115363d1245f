"""Every value that crosses an arrow of the design: frozen, typed, without behaviour.

Ages and durations are seconds (`_s`), sizes are bytes, dates are seconds since the epoch (`_at`). Agents send
ages, never dates: windows are measured on the receiver's clock. All structs tolerate unknown fields, so that
an agent and a controller one version apart understand each other; new fields always carry a default.
"""
