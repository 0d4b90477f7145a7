#pragma once

#include <functional>
#include <vector>

namespace tessera {

/// What attaches something from outside returns this; destroying it detaches. Move-only. Undo functions run in the reverse order of adding and must
/// not throw.
class [[nodiscard]] Attachment {
 public:
  Attachment() = default;
  explicit Attachment(std::function<void()> undo);
  ~Attachment();
  Attachment(Attachment&& other) noexcept;
  Attachment& operator=(Attachment&& other) noexcept;  ///< detaches what this held before

  void add(Attachment other);  ///< from now on both are detached together
  void detach();               ///< detaches now
  void release();              ///< never detaches: what was attached stays for good
  bool empty() const { return undo_.empty(); }

 private:
  std::vector<std::function<void()>> undo_;
};

}  // namespace tessera
