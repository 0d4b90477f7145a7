#pragma once

namespace gloo::transport {

/// A network interface and the thread that watches its sockets. Only ever shared, never made or looked into here.
class Device;

}  // namespace gloo::transport
