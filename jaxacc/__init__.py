"""Exact gradient accumulation for JAX and Optax."""

from jaxacc import losses as losses
from jaxacc import streaming as streaming
from jaxacc import windows as windows
from jaxacc._accumulate import Accumulated as Accumulated
from jaxacc._accumulate import Evaluation as Evaluation
from jaxacc._accumulate import accumulate as accumulate
from jaxacc._distributed import distributed_initialize as distributed_initialize
from jaxacc._inspect import Collective as Collective
from jaxacc._inspect import check_reduction as check_reduction
from jaxacc._inspect import inspect_collectives as inspect_collectives
from jaxacc._ledger import Counter as Counter
from jaxacc._ledger import Ledger as Ledger
from jaxacc._ledger import check_skipped as check_skipped
from jaxacc._mean import Max as Max
from jaxacc._mean import Mean as Mean
from jaxacc._mean import Sum as Sum
from jaxacc._mean import merge as merge
from jaxacc._mesh import Layout as Layout
from jaxacc._mesh import place_window as place_window
from jaxacc._plan import Candidate as Candidate
from jaxacc._plan import Plan as Plan
from jaxacc._plan import plan as plan
from jaxacc._scaling import LossScale as LossScale
from jaxacc._split import Split as Split
from jaxacc._split import solve_split as solve_split
from jaxacc._split import split_batch as split_batch
from jaxacc._step import Outcome as Outcome
from jaxacc._step import Step as Step
from jaxacc._step import StepInfo as StepInfo
from jaxacc._step import TrainState as TrainState
from jaxacc._step import make_step as make_step
from jaxacc._stream import Accumulator as Accumulator
from jaxacc._two_pass import two_pass as two_pass

__version__ = "0.1.0"
