"""stable-baselines3: PPO with environments in processes of their own, its table of figures,
CheckpointCallback; one learner.

A step is one of all environments at once. A fault of the data is one of an environment."""

import glob
import os

import faults
import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback
from stable_baselines3.common.vec_env import SubprocVecEnv

ENVIRONMENTS = 2


class World(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.age = 0

    def reset(self, *, seed=None, options=None):
        self.age = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        faults.sample()
        self.age += 1
        return np.full(4, action / 2, np.float32), float(action), self.age >= 20, False, {}


class Note(BaseCallback):
    def _on_step(self):
        faults.made(self.num_timesteps // ENVIRONMENTS)
        faults.forward()
        if self.n_calls % faults.EVALUATE_EVERY == 0:
            for _ in range(faults.evaluation_samples(4)):
                faults.evaluated()
        return True


def main():
    faults.begin()
    faults.slow_torch_save()
    torch.set_num_threads(1)
    worlds = SubprocVecEnv([World] * ENVIRONMENTS, start_method="fork")
    saved = sorted(glob.glob("checkpoints/*.zip"), key=os.path.getmtime)
    more = {"n_steps": 10, "batch_size": 10, "n_epochs": 1, "verbose": 1, "device": "cpu"}
    model = PPO.load(saved[-1], env=worlds) if saved else PPO("MlpPolicy", worlds, **more)
    left = faults.STEPS * ENVIRONMENTS - model.num_timesteps
    callbacks = [CheckpointCallback(faults.SAVE_EVERY, "checkpoints"), Note()]
    model.learn(left, callback=callbacks, reset_num_timesteps=False)
    worlds.close()


main()
