#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/StorageImpl.h>

namespace pretend {

// Draws what the CPU's generator of the same seed draws.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(uint64_t seed);
  static c10::DeviceType device_type() {
    return c10::DeviceType::PrivateUse1;
  }
  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  Generator* clone_impl() const override;

  at::Generator host;
};

const at::Generator& default_generator();
void resize_storage(c10::StorageImpl* storage, size_t nbytes);
void register_hooks();

}  // namespace pretend
