"""Core: SimpleFSDP for any nn.Module; imports torch and nothing else.

On import: gloo process groups get one worker thread each from now on, see compat.use_one_gloo_thread.
"""

from .compat import use_one_gloo_thread

use_one_gloo_thread()
