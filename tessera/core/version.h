#pragma once

namespace tessera {

/// Version of the library, as "major.minor.patch".
const char* version();

}  // namespace tessera
