#pragma once

#include <functional>

#include "tessera/config/config.h"
#include "tessera/mesh/mesh.h"
#include "tessera/train/compose.h"

namespace tessera {

/// What the first and the last stage both use (model.tie_embeddings): each has a copy of its own, under the embedding's name, and what brings the two together
/// becomes `run.tied`. Nothing where the model is whole, or nothing is tied. Collective over the mesh's role `tied`.
///
/// On meta nobody answers; but what the other end would say follows from the layout of its stage, which `compose_end` composes as a rank of that end does, and
/// which is gone before this returns. Without meta it is not called.
using ComposeEnd = std::function<Composition(const Mesh& there)>;
void tie_stages(const Config& config, const Mesh& mesh, Composition& run, const ComposeEnd& compose_end);

}  // namespace tessera
