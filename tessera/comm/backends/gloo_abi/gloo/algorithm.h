// ProcessGroupGloo.hpp includes this file and uses nothing of it.
#pragma once
