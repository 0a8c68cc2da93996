// Division of a job into pieces of work, and the merge of their results.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace overspill {

// One segment's contribution to the result of a query token.
struct Part {
    int32_t segment, first_chunk, end_chunk;
    int32_t position;  // of the query token among those of the segment
};

// Division of a job, valid for every job with the same layout and segments: the layers of a step share it.
struct Plan {
    const OverspillLayout* layout = nullptr;
    const OverspillSegment* segments = nullptr;
    int num_segments = 0, num_queries = 0;
    const Kernel* kernel = nullptr;
    std::vector<Chunk> chunks;
    std::vector<Part> parts;          // by query token
    std::vector<int32_t> first_part;  // index of each query token's first part, and one past the last
    size_t result_floats = 0, query_floats = 0, state_floats = 0;
    int64_t bytes = 0;  // KV that the job reads

    bool fits(const OverspillJob& job) const {
        return layout == job.layout && segments == job.segments && num_segments == job.num_segments &&
               num_queries == job.num_queries;
    }
};

// Reason why the job is impossible; empty if it is possible.
std::string objection(const OverspillJob& job);
// `forced` is the kernel to use, or null for the best; the plan has no kernel if none can run the job.
Plan make_plan(const OverspillJob& job, const Kernel* forced);
// Writes the output and log-sum-exp of one query token and query head.
void merge(const OverspillJob& job, const Plan& plan, const float* results, int query, int head);

}  // namespace overspill
